"""Has the name of one of ours."""

WHO = "the script's own dashboard"
