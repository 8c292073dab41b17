"""`python -m tools.reference`: rewrite docs/reference."""

from tools.reference import OUT, write
from tools.reference.source import ROOT

print(f"{write()} pages in {OUT.relative_to(ROOT)}")
