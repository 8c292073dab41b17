"""`python main.py` runs the main job: the demo, offline.

`python main.py train …` and the other verbs work too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from proxima.cli import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["demo"])
