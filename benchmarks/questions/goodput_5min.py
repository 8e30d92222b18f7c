"""What is trained with a kill every five minutes? Takes half an hour."""

from benchmarks.question import Question
from benchmarks.questions.goodput import MEANS, during

QUESTION = Question(
    name="goodput-5min",
    asks="What is trained with a kill every 5 minutes? (Takes half an hour.)",
    rows=(during(300.0),),
    rounds=1,
    means=f"The target is 0.95 with a kill every 5 minutes.\n\n{MEANS}",
)
