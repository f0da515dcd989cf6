"""An objective of one's own, named in a recipe by its import path: another one at each step, to try many in one run."""

from megarl.objectives import make_objective


class Rotation:
    """`{objectives: [spec, ...]}`: step s trains with the s-th of them."""

    uses_value_model = False
    couples_groups = True

    def __init__(self, parameters):
        self.parts = [make_objective(spec) for spec in parameters["objectives"]]
        self.needs = frozenset().union(*(part.needs for part in self.parts))

    def at(self, step, entropy=None):
        return self.parts[(step - 1) % len(self.parts)].at(step, entropy)
