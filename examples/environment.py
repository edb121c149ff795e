"""An environment that judges kernels: reset and step.

`reset` describes a task, and `step` takes a kernel's text and returns a reward: how many times as fast as the package's
kernel it is at least, or 0 for one that the judge refuses.
"""

from cpuopt.judge.desk import Desk


class Environment:
    """A task of the judge."""

    def __init__(self, op, model="gpt2-tiny"):
        self.op, self.model, self.desk = op, model, Desk()

    def reset(self):
        return self.desk.describe(self.op, self.model)

    def step(self, text):
        found = self.desk.time(text, self.op, self.model)
        return found, found["timed"].get("score", 0.0)


environment = Environment("gelu_forward")
with environment.desk:
    print(environment.reset()["formula"].splitlines()[0])
    found, reward = environment.step("import os\n")
    print(reward, found["verdict"], found["reason"])
