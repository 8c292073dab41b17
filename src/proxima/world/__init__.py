"""A closed world of Reddit-style posts, in which all of RLHF can be tried and judged offline.

In: a seed. Out: posts, demonstrations of mixed quality, preferences of simulated annotators, and a gold score
in [0, 1]. Nothing that trains may import this package: the gold score only labels preferences and judges
held-out posts.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.world.annotators import Annotator
    from proxima.world.demonstrations import write_summary
    from proxima.world.gold import gold_score
    from proxima.world.posts import Post, make_posts
    from proxima.world.sample_files import write_samples

__all__, __getattr__ = lazy_exports(__name__)
