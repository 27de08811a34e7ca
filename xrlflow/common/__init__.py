"""Used by all folders: deadlines that hold for all called functions (`deadline`), and text from outside that is safe to
print (`text`)."""
