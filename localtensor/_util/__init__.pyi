from localtensor._util.call_sites import place_of_frame as place_of_frame
from localtensor._util.events import Died as Died
from localtensor._util.events import Outcome as Outcome
from localtensor._util.events import Place as Place
from localtensor._util.events import Raised as Raised
from localtensor._util.events import Returned as Returned
from localtensor._util.events import Waiting as Waiting
from localtensor._util.opinfo import drawn_samples as drawn_samples
