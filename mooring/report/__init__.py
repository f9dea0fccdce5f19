"""Output for people: terminal, figures, reports. It uses plain tables and run directories, and trains nothing."""
