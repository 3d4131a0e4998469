"""Result schema, folder layout, trajectories, data frames."""
