"""How long a forward takes by its number of rows: a fixed part and a part for each row, fitted as they are measured."""

from dataclasses import dataclass

# The slope begins as if this much spread of row counts (sum of squares) had been seen.
_PRIOR_SPREAD = 24.0
# One forward that the system held up must not bend the line.
_MOST_OVER_MEAN = 3.0


@dataclass(slots=True)
class RowTimes:
    """Least squares for fixed + per_row * rows, with a prior on the slope as a share of the mean time."""

    prior_slope: float
    count: int = 0
    mean_rows: float = 0.0
    mean_seconds: float = 0.0
    _spread: float = 0.0
    _covariance: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Count one forward."""
        if self.count >= _MOST_OVER_MEAN:
            seconds = min(seconds, _MOST_OVER_MEAN * self.mean_seconds)
        self.count += 1
        from_mean = rows - self.mean_rows
        self.mean_rows += from_mean / self.count
        self.mean_seconds += (seconds - self.mean_seconds) / self.count
        self._spread += from_mean * (rows - self.mean_rows)
        self._covariance += from_mean * (seconds - self.mean_seconds)

    @property
    def per_row(self) -> float:
        """Seconds that one more row costs; never below 0."""
        prior = _PRIOR_SPREAD * self.prior_slope * self.mean_seconds
        return max(0.0, (self._covariance + prior) / (self._spread + _PRIOR_SPREAD))

    @property
    def fixed(self) -> float:
        """Seconds of a forward before its first row; never below 0."""
        return max(0.0, self.mean_seconds - self.per_row * self.mean_rows)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a forward over `rows` rows."""
        return self.fixed + self.per_row * rows
