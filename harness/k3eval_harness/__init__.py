"""The harness: tasks, sandboxes, agents, trials, grading, statistics, reports and the command line."""
