"""A pytest plugin (``-p fuzz.hypothesis_profile``): the same examples each time, few, and no shrinking.

For mutation runs: whether a mutant dies must not depend on chance, nobody reads how it died, and one that
lives waits for every example of every test.
"""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("mutants")
