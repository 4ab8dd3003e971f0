"""A judge that no training saw: VADER's compound sentiment of a review, from -1 to 1 (pip install vadersentiment)."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def sentiment(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """Of the prompt and what the model wrote after it."""
    texts = (prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
    return [_ANALYZER.polarity_scores(text)["compound"] for text in texts]
