"""`python -m tools.reference`: rewrite docs/reference, and the list of files in the README."""

from tools.reference import OUT, write
from tools.reference.layout import with_layout
from tools.reference.source import ROOT

readme = ROOT / "README.md"
readme.write_text(with_layout(readme.read_text(encoding="utf-8")), encoding="utf-8")
print(f"{write()} pages in {OUT.relative_to(ROOT)}, and the list of files in {readme.name}")
