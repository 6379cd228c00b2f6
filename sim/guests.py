"""What runs on the nodes of the jobs' world."""


class Guest:
    """A stand-in for a job's process: one step a second, a checkpoint every few, an end. A `mate` of a gang ends when it is
    told to."""

    def __init__(self, step: int, of: int, mate: bool = False) -> None:
        self.step = self.saved = step
        self.of = of
        self.mate = mate
        self.vacating = False
        self.ended = False
