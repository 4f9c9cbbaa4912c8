"""What users' own functions do wrong."""


class MistakeError(Exception):
    """A function of the user's does not do what it is for; the message is the sentence that the command ends with.

    It is raised, not printed on the spot: a bar of progress has to be gone before.
    """
