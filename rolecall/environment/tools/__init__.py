"""Tools that a policy may call, ready to serve, and the episode around any of them:

    from rolecall.environment import serve
    from rolecall.environment.tools import ToolEpisode
    from rolecall.environment.tools.calculator import Calculator

    def right(task, answer):
        return float(answer.strip() == task.ground_truth)

    if __name__ == "__main__":
        make = lambda: ToolEpisode([Calculator()], right)
        sys.exit(serve(make, name="sums", range=(0, 1), roles=("user", "tool")))

The run names the parser of its model's calls, `environments.*.tool_parser`.
"""

from rolecall.environment.tools.episode import CallableTool, ToolEpisode

__all__ = ["CallableTool", "ToolEpisode"]
