"""SW2xxx: one line a code, what is wrong in general."""

MODEL_CODES: dict[str, str] = {
    "SW2001": "the model is not on this machine",
    "SW2002": "the model folder has no readable config.json",
    "SW2003": "the model type is unknown",
    "SW2004": "the model type is not supported in this version",
    "SW2005": "a configuration key is unknown to this model type",
    "SW2006": "a configuration value has the wrong type or range",
    "SW2007": "the configuration contradicts itself",
    "SW2008": "the attention implementation is not available for this model type",
    "SW2009": "part of the model cannot be split",
    "SW2010": "the hub has no such model",
    "SW2011": "the model has no such revision",
    "SW2012": "the model is gated",
    "SW2013": "the model's repository has no config.json",
    "SW2014": "the model runs code of its own",
    "SW2015": "the model source is neither a folder nor a hub id",
    "SW2016": "the model cannot be proved to come apart into layers",
    "SW2017": "the model is an encoder-decoder",
    "SW2018": "the model's own code does not load",
}
