"""Who hears of a training run in tests."""

import signal


class Listener:
    """Keeps what it hears; calls `act` when step `after` is done, or at each validation if that is 0."""

    def __init__(self, after=None, act=lambda: None):
        self.after, self.act = after, act
        self.steps, self.vals, self.notes = [], [], []

    def step_done(self, metrics):
        self.steps.append(metrics)
        if metrics["step"] == self.after:
            self.act()

    def validation(self, step, loss):
        self.vals.append((step, loss))
        if self.after == 0:
            self.act()

    def sample(self, step, text):
        self.notes.append((step, text))

    def note(self, text):
        self.notes.append(text)


def raising(*numbers):
    """Make an act that sends signals to this process."""
    return lambda: [signal.raise_signal(n) for n in numbers]


class KilledError(Exception):
    """As if the run had been killed."""


def die():
    """End a run as a kill would."""
    raise KilledError
