"""All answers are those that are stored: moves of code change none of them."""

import pytest

from tests.frozen_answers import QUESTIONS, answer_question, compare, is_of_other_cpu, list_subjects, read

pytestmark = pytest.mark.slow
SUBJECTS = {question: list_subjects(question) for question in QUESTIONS}


@pytest.mark.parametrize("question, name", [(question, name) for question in SUBJECTS for name in SUBJECTS[question]])
def test_answers_are_those_that_are_stored(question, name):
    if is_of_other_cpu(question):
        pytest.skip("was written on another kind of CPU")
    actual = answer_question(question, SUBJECTS[question][name])
    assert not dict(compare(question, read(question)[name], actual))
