"""What training minimises: the objectives of a step."""
