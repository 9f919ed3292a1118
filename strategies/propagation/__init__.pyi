from localtensor.concurrency.single_flight import Once as Once
from strategies.propagation.cache import answers as answers
from strategies.propagation.cache import key_of as key_of
from strategies.propagation.explicit.context import communicates as communicates
from strategies.propagation.propagator import Propagator as Propagator
