"""What runs a run: watches, copies, examines, predicts, reports and publishes it."""
