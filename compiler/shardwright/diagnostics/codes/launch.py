"""SW5xxx: one line a code, what is wrong in general. 51 the compiled folder, 52 what launches it."""

LAUNCH_CODES: dict[str, str] = {
    "SW5101": "the output path is not a folder",
    "SW5102": "the output folder holds something that is not ours",
    "SW5103": "the output folder cannot be written",
    "SW5104": "a folder inside the output folder is a link or a file",
    "SW5105": "the checkpoint directory collides with the compiled files",
    "SW5106": "a run of the output folder is alive",
    "SW5201": "a line of the hostfile cannot be read",
    "SW5202": "a host stands twice in the hostfile",
    "SW5203": "the hostfile does not have the hosts or slots of the cluster",
    "SW5204": "the hostfile or the set-up script cannot be read",
    "SW5205": "a value that the launcher does not quote",
    "SW5206": "the launcher cannot start this many nodes",
    "SW5207": "a hostfile for a launcher that does not read one",
    "SW5208": "the job could not be submitted",
}
