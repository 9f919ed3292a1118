from localtensor.threads.state.swap import SLOTS as SLOTS
