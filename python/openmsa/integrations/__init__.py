"""openmsa inside other libraries' models. Each module imports its library when it is asked to register, not before."""

from . import transformers as transformers
