"""What a run leaves behind: its folder, metrics, time ledger, progress lines and report. Imports no torch."""
