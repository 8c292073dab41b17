"""Chooses the reader of a source: by file ending, folder or Hugging Face dataset id. In: a file, a folder or
a Hugging Face dataset id. Out: `Rows`, or one sentence that says why not.

    prompts.txt  data.jsonl  data.json  data.csv  data.tsv  data.parquet      a file; all but Parquet also as
    .gz
    FOLDER  FOLDER:SPLIT                files of one kind (of those that begin with SPLIT), or what
    `save_to_disk` wrote
    OWNER/NAME  OWNER/NAME:SPLIT        a dataset of the Hugging Face Hub; without a split `train`
    OWNER/NAME/CONFIG:SPLIT             one of its configurations

A file or folder of that name on this machine comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from proxima.core.errors import first_line
from proxima.core.hub import hub_or_cache
from proxima.data.rows import BrokenData, JoinedRows, ListRows, Rows
from proxima.data.text_files import CsvRows, JsonRows, TextRows, read_json

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?")
SPLITS = ("train", "test", "valid", "eval", "dev")


def open_rows(source: str | Path | Rows, limit: int = 0) -> Rows:
    """The rows of a source; with `limit` only the first ones, and no more are downloaded from the Hub."""
    if isinstance(source, Rows):
        return source
    if not str(source).strip():
        raise ValueError("the name of the data is empty; give a file, a folder or a Hugging Face dataset")
    if limit < 0:
        raise ValueError(f"limit ({limit}) must be at least 0 (0 = all)")
    path, split = Path(source), ""
    if not path.exists():
        name, _, split = str(source).rpartition(":")
        path = Path(name if name else source)
        split = split if name else ""
    if path.is_dir():
        rows = open_folder(path, split, limit)
    elif path.exists() and not split:
        rows = open_file(path, limit)
    elif kind(path) not in FILES and HUB_ID.fullmatch(path.as_posix()):
        rows = open_hub(path.as_posix(), split, limit)
    else:
        raise ValueError(f"cannot read {str(source)!r}: there is no such file or folder")
    if not len(rows):
        raise BrokenData(f"{source} holds no rows")
    return rows


def kind(path: Path) -> str:
    """The ending that decides how a file is read."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def open_file(path: Path, limit: int = 0) -> Rows:
    if kind(path) not in FILES:
        raise ValueError(f"{path} must end in {', '.join(FILES)} (all but .parquet may be followed by .gz)")
    if not path.is_file():
        raise ValueError(
            f"{path} is a pipe or a device; data is read more than once, so save it to a file first"
        )
    try:
        return FILES[kind(path)](path, limit)
    except BrokenData:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def open_folder(folder: Path, split: str = "", limit: int = 0) -> Rows:
    """What `datasets` saved there, or all files of the one kind that lie there."""
    if (folder / "dataset_dict.json").is_file():
        with needs_datasets(str(folder)) as datasets:
            splits = datasets.load_from_disk(str(folder))
        return of_split(splits, split, str(folder), limit)
    if (folder / "dataset_info.json").is_file() and not split:
        with needs_datasets(str(folder)) as datasets:
            return first_rows(datasets.load_from_disk(str(folder)), str(folder), limit)
    parts: list[Rows] = []
    for path in _files_of_one_kind(folder, split):
        missing = limit - sum(len(part) for part in parts)
        if limit and missing <= 0:
            break
        parts.append(open_file(path, missing if limit else 0))
    return JoinedRows([part for part in parts if len(part)] or parts, str(folder))


def _files_of_one_kind(folder: Path, split: str) -> list[Path]:
    """The files of one split; all of them where there is only one."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and kind(path) in FILES and path.name.startswith(split)
    )
    kinds = sorted({kind(path) for path in files})
    named = [name for name in SPLITS if any(path.name.startswith(name) for path in files)]
    if not files:
        raise ValueError(
            f"{folder} holds no file{f' that begins with {split}' if split else ''} ending in "
            f"{', '.join(FILES)}"
        )
    if len(kinds) > 1:
        raise ValueError(f"{folder} holds files of several kinds ({', '.join(kinds)}); name one file")
    if len(named) > 1:
        raise ValueError(
            f"{folder} holds several splits ({', '.join(named)}); say which, for example {folder}:{named[0]}"
        )
    return files


def open_parquet(path: Path, limit: int = 0) -> Rows:
    """Parquet, through an Arrow file in the cache of `datasets` that is mapped into memory."""
    with needs_datasets(str(path)) as datasets:
        from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

        if not read_metadata(path).num_rows:  # `datasets` fails there, and does not say why
            return ListRows([], str(path))
        shown = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            found = datasets.load_dataset("parquet", data_files=str(path), split="train")
        finally:
            if shown:
                datasets.enable_progress_bars()
    return first_rows(found, str(path), limit)


def open_hub(name: str, split: str = "", limit: int = 0) -> Rows:
    """A dataset of the Hugging Face Hub, downloaded; with a limit it is streamed and only the first rows
    come."""
    owner, dataset, *config = name.split("/")
    with needs_datasets(name) as datasets:
        splits = datasets.load_dataset(f"{owner}/{dataset}", *config, streaming=bool(limit))
        return of_split(splits, split, name, limit)


def of_split(splits: DatasetDict | IterableDatasetDict, split: str, name: str, limit: int) -> Rows:
    """One split: the named one, else `train`, else the only one."""
    split = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if split not in splits:
        raise ValueError(
            f"{name} has no split {split!r}; it has {', '.join(f'{name}:{other}' for other in splits)}"
        )
    return first_rows(splits[split], f"{name}:{split}", limit)


def first_rows(dataset: Dataset | IterableDataset, name: str, limit: int) -> Rows:
    if not hasattr(dataset, "__len__"):  # streamed
        return ListRows(list(dataset.take(limit)), name)
    return ListRows(dataset.select(range(min(limit, len(dataset)))) if limit else dataset, name)


@contextmanager
def needs_datasets(name: str) -> Iterator[ModuleType]:
    """The `datasets` package, whose failures become one sentence."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"reading {name!r} needs the package datasets: pip install datasets") from None
    with hub_or_cache(name) as problem:
        try:
            yield datasets
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith(name):  # of_split's own
                raise
            if (
                isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
            ):  # says only that there was one
                error = Exception(error.__cause__)
            reason = first_line(error).rstrip(".")
            if Path(name).exists():
                raise BrokenData(f"cannot read {name}: {reason}") from None
            if problem:
                missing = isinstance(error, ConnectionError)
                reason = (
                    f"{problem}, and "
                    f"{'it was not downloaded before' if missing else f'of what was downloaded: {reason}'}"
                )
            raise ValueError(
                f"cannot load {name!r} (no file or folder on this machine, so a Hugging Face dataset): "
                f"{reason}. "
                f"Offline, give a local file; HF_HUB_OFFLINE=1 uses only what is already downloaded."
            ) from None


def read_tsv(path: Path, limit: int = 0) -> Rows:
    return CsvRows(path, limit, "\t")


FILES: dict[str, Callable[[Path, int], Rows]] = {
    ".jsonl": JsonRows,
    ".json": read_json,
    ".csv": CsvRows,
    ".tsv": read_tsv,
    ".parquet": open_parquet,
    ".txt": TextRows,
}
"""How a file is read, by its ending."""
