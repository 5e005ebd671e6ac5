"""All answers are those that are stored: moves of code change none of them."""

import pytest

from tests.frozen_answers import QUESTIONS, answer_question, compare, list_subjects, read

pytestmark = pytest.mark.slow
SUBJECTS = {question: list_subjects(question) for question in QUESTIONS}


@pytest.mark.parametrize("question, name", [(question, name) for question in SUBJECTS for name in SUBJECTS[question]])
def test_answers_are_those_that_are_stored(question, name):
    actual = answer_question(question, SUBJECTS[question][name])
    assert not dict(compare(question, read(question)[name], actual))
