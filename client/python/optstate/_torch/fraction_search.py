"""The search for the offload_fraction whose updates take the least time."""

from __future__ import annotations

# Steps with a fraction: the first ones fill buffers and move records, and do not count, since each
# brings a fourth of the records that stay on devices up to date, with what they lack since then; of
# the others the fastest counts, which other programs have disturbed least.
SETTLING_STEPS, MEASURED_STEPS = 4, 2
TRIED_MAX = 12
_REACH, _REACH_MIN = 0.1, 0.02


class FractionSearch:
    """Proposes fractions, and learns how long updates with them take.

    An update by the CPU and devices takes about max(fraction * cpu, (1 - fraction) * devices),
    where `cpu` and `devices` are the times of each alone. So these two are measured first, then the
    fraction where both would end together, then what is beside the fastest one, ever nearer: what a
    link or the memory that both use takes is not in the formula.
    """

    def __init__(self) -> None:
        self.fraction = 1.0  # that the next step is to have; the fastest one in the end
        self.is_over = False
        self.times: dict[float, float] = {}  # by fraction
        self._taken: list[float] = []
        self._reach = _REACH

    @property
    def best(self) -> float:
        """Returns the fastest fraction so far; of equal ones the first, which is the CPU alone."""
        return min(self.times, key=self.times.__getitem__)

    def note(self, seconds: float) -> None:
        """Takes the time of an update with `fraction`, which changes when it is known well."""
        self._taken.append(seconds)
        if self.is_over or len(self._taken) < SETTLING_STEPS + MEASURED_STEPS:
            return
        self.times[self.fraction] = min(self._taken[SETTLING_STEPS:])
        self._taken = []
        following = self._following()
        self.is_over = following is None
        self.fraction = self.best if following is None else following

    def _following(self) -> float | None:
        """Returns the fraction to try next; None: the best one is known."""
        times = self.times
        if 0.0 not in times:
            return 0.0
        if len(times) == 2 and times[1.0] + times[0.0] > 0:
            balanced = round(times[0.0] / (times[1.0] + times[0.0]), 3)
            if balanced not in times:
                return balanced
        while self._reach >= _REACH_MIN and len(times) < TRIED_MAX:
            for step in (-self._reach, self._reach):
                beside = min(1.0, max(0.0, round(self.best + step, 3)))
                if beside not in times:
                    return beside
            self._reach /= 2
        return None
