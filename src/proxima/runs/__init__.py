"""Run folders, written and read. In: runs/NAME, finished, broken or still training. Out: `Run` with its
metrics, samples and tokens. No content of a file makes it fail: what cannot be read is left out, and
`problems` says so."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runs.environment import DECIDES, describe_environment
    from proxima.runs.evidence import held_out_evidence, judges_in
    from proxima.runs.finetuning_folder import LIVE_FILES, live_folder
    from proxima.runs.glossary import (
        GLOSSARY,
        Metric,
        MetricGroup,
        chart_of,
        charts_in_groups,
        explain,
        is_defined,
        title_of,
        unit_of,
        with_unit,
        without_backticks,
    )
    from proxima.runs.guards import MAX_ROLLBACKS, Alarm, alarms
    from proxima.runs.metrics import (
        ROUNDING,
        advantage_metrics,
        numbers_of,
        rollout_metrics,
        sampling_gap,
        score_metrics,
        update_metrics,
    )
    from proxima.runs.run_files import (
        BUNDLE_SUFFIX,
        REPLAY_FOLDER,
        bundle_paths,
        make_run_folder,
        plain,
        write_json,
    )
    from proxima.runs.run_origin import (
        Kind,
        note_checks,
        noting_command,
        read_origin,
        resume_command,
        write_examination,
    )
    from proxima.runs.run_plot import Plot
    from proxima.runs.run_reader import Run, first_step_row
    from proxima.runs.run_search import find_runs
    from proxima.runs.run_writer import RunFolder
    from proxima.runs.step_bundle import (
        EPISODE,
        LARGEST_BUNDLE,
        TOLERANCE,
        Bundle,
        checksum,
        read_bundle,
        write_bundle,
    )
    from proxima.runs.thin_curves import Point, thin
    from proxima.runs.token_files import number

__all__, __getattr__ = lazy_exports(__name__)
