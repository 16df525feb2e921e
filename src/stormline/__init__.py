"""stormline keeps apps connected, and their requests succeeding, on networks that lose, stall, lie and change."""
