"""Your own environment as an EnvironmentService, in ten lines:

    from rolecall.environment import Action, Answer, Env, Task, serve

    class Echo(Env):
        def reset(self, task: Task, seed: int) -> str:
            self.word = task.ground_truth
            return f"Say {self.word}."

        def step(self, action: Action) -> Answer:
            return Answer(reward=float(action.text == self.word), is_over=True)

    if __name__ == "__main__":
        sys.exit(serve(Echo, "127.0.0.1:50080", name="echo", range=(0, 1)))

Also the client that a rollout plays with (`client.py`). The contract is `proto/rolecall/v1/environment.proto`;
docs/environments.md says how to write one.
"""

from rolecall.environment.env import (
    Action,
    Agent,
    Answer,
    Env,
    Image,
    ImageMessage,
    Messages,
    Opening,
    Policy,
    Task,
    Tool,
    ToolCall,
)
from rolecall.environment.server import serve
from rolecall.scoring.scores import Message, Score

__all__ = [
    "Action",
    "Agent",
    "Answer",
    "Env",
    "Image",
    "ImageMessage",
    "Message",
    "Messages",
    "Opening",
    "Policy",
    "Score",
    "Task",
    "Tool",
    "ToolCall",
    "serve",
]
