"""The state that every back end keeps: its files, its time in host memory, and the schedule, which has no other."""
