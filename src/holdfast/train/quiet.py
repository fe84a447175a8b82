"""What transformers says while it works is not for those who asked for a comparison."""


def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
