"""The fit loop's own parts: losses, schedules, validation, exact resume. They know no configuration framework."""
