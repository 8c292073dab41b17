"""Settings: names, defaults, ranges, presets, YAML, what a resumed run may change.

In: keyword arguments, YAML or command-line flags. Out: checked settings.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.config.finetuning_config import (
        SETTINGS_FILE,
        FinetuningConfig,
        RewardConfig,
        saved_settings,
        settings_in,
        trained_quantize,
    )
    from proxima.config.ppo_config import PPOConfig
    from proxima.config.presets import PRESETS, Preset, preset_values
    from proxima.config.reward_spec import GYM_PREFIX, RewardSpec
    from proxima.config.secrets import hide_address, hide_options, shareable, shareable_words
    from proxima.config.setting_checks import TRACKERS
    from proxima.config.setting_declaration import declarations, former_names, setting
    from proxima.config.settings_base import (
        Settings,
        Values,
        check_value,
        checked,
        current_names,
        read_yaml,
        warn_renamed,
    )
    from proxima.config.trust import check_trust, trusted_flags

__all__, __getattr__ = lazy_exports(__name__, {"StageConfig": "FinetuningConfig"})
