def needs_answer(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
