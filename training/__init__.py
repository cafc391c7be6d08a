"""The mechanics that both stages share: configuration, run folder, schedule, optimizer, checkpoints, meters."""
