"""A pytest plugin (``-p fuzz.hypothesis_profile``): the same examples each time, and no shrinking.

For mutation runs: whether a mutant dies must not depend on chance, and nobody reads how it died.
"""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("mutants")
