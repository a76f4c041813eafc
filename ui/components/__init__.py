"""Layout only: each module makes the elements of one part of the page and returns them by name."""
