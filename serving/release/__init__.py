"""The release bundle and the champion that is followed."""
