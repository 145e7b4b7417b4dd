"""Choice of the next growth: an ask/tell state machine without torch, files or clock."""
