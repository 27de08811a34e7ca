"""What any room may use: deadlines that hold for all that is called (`deadline`), and text from outside that is safe to
print (`text`)."""
