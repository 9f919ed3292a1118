from strategies.propagation.cache_key import Once as Once
from strategies.propagation.cache_key import answers as answers
from strategies.propagation.cache_key import key_of as key_of
from strategies.propagation.explicit.context import communicates as communicates
from strategies.propagation.propagator import Propagator as Propagator
