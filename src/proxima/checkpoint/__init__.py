"""What lets a run continue after a kill. In: a step's state. Out: folders on disk that are whole, checked, or passed over."""

from proxima.checkpoint.checkpoints import Checkpoint, Checkpoints
from proxima.checkpoint.folders import write_folder

__all__ = ["Checkpoint", "Checkpoints", "write_folder"]
