"""The hooks that core-plugin brings: what a run prints, records and draws."""
