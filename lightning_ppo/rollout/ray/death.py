"""What Ray says about the end of an actor, shortened to one line."""

_LONGEST = 200
_STARTS = ("Worker exit detail:", "The actor is dead because ", "The actor died because of an error raised in its ")
# What follows these is guesswork and advice.
_ENDS = (" Some common causes", " The actor never ran")


def cause_of_death(error: BaseException) -> str:
    """The reason in one of Ray's long messages."""
    text = " ".join(str(error).split())
    for start in _STARTS:
        _, found, reason = text.partition(start)
        if found:
            text = reason
            break
    for end in _ENDS:
        text = text.partition(end)[0]
    return text.strip().rstrip(".")[:_LONGEST] or type(error).__name__
