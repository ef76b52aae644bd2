"""What a run writes and how it is read back: manifest, JSON lines, stage records, atomic storage, progress, stop signals. No torch."""
