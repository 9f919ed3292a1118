from localtensor.threads.state.propagation_settings import AUTOCAST_DEVICES as AUTOCAST_DEVICES
from localtensor.threads.state.propagation_settings import SETTINGS as SETTINGS
from localtensor.threads.state.propagation_settings import ambient_settings as ambient_settings
from localtensor.threads.state.swap import SLOTS as SLOTS
