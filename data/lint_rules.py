"""The rules that `data/lint.py` checks tar shards against: what each means, and what to do about it."""

from typing import Literal, NamedTuple

from data.errors import Cause
from data.shards import INDEX_COMMAND, MAKE_COMMAND, MANIFEST_NAME

Severity = Literal["error", "warning"]


class Rule(NamedTuple):
    """One way in which a shard can be wrong."""

    severity: Severity
    """error: a reader loses data, stops, or is refused. warning: it copes, and a person may want to know."""
    meaning: str
    remedy: str


_COPY = "copy or download it again; where the source is damaged too, write it anew"
_SORT = "pack it so that the members of a sample follow one another (`tar --sort=name`), each under a key of its own"
_NAMES = f"give every sample a name of its own without dots before its suffix, or let `{MAKE_COMMAND}` choose the names"
_TAKE_OUT = f"take it out, or put a readable file in its place; `{MAKE_COMMAND}` leaves such images out by itself"
_NOTHING = "nothing needs to be done"
_INDEX = f"describe the shards as they are now with `{INDEX_COMMAND}`"

RULES: dict[str, Rule] = {
    # The file
    "unreadable_file": Rule("error", "the file can not be opened or read", "look at its permissions and at the disk"),
    "empty_file": Rule("error", "the file has no bytes", _COPY),
    "compressed": Rule("error", "the tar is compressed, so no sample can be read by its place", "unpack it to a plain tar"),
    "not_a_tar": Rule("error", "no header of a tar can be found in it", _COPY),
    "truncated": Rule("error", "the file was cut off inside a member", _COPY),
    "no_end_mark": Rule("error", "the file ends without the mark of a tar's end: it was cut off between two members", _COPY),
    "bad_header": Rule("error", "a member's header is damaged: readers of tars stop there, or lose the member", _COPY),
    "zero_block": Rule("error", "zeros stand amid the members: readers of tars take them for the end", _COPY),
    "concatenated": Rule(
        "error", "several tars in a row: readers stop after the first", "keep them apart, or join them with `tar --concatenate`"
    ),
    "garbage_after_end": Rule("error", "bytes that are no tar follow after the end of the tar", _COPY),
    "empty_shard": Rule("warning", "a sound tar without a sample", "remove it, or find out why it is empty"),
    "no_samples": Rule("error", "no sample in any of the shards", f"pack images with `{MAKE_COMMAND}`"),
    # Members
    "extended_header": Rule("warning", "members with pax or GNU headers; our readers pass over them", _NOTHING),
    "folder": Rule("warning", "members that are folders; readers pass over them", _NOTHING),
    "link": Rule("error", "members that are links: what they point to is not in them", "pack with `tar --dereference`"),
    "special_member": Rule("error", "members that are sparse files, devices or pipes", "pack plain files only"),
    "hidden": Rule("warning", "hidden members, such as those of macOS (._name); readers pass over them", _NOTHING),
    "no_suffix": Rule("warning", "members without a suffix; readers pass over them", "give them one, or leave them out"),
    "long_name": Rule(
        "warning", "names of more than 100 bytes; messages about such a sample show the first 100", "give short names"
    ),
    # Samples
    "interleaved": Rule("error", "members of a sample with others in between: read as several, incomplete samples", _SORT),
    "duplicate_key": Rule("error", "a key with the same suffix twice: the second would be lost", _SORT),
    "dots_in_name": Rule("error", "a dot before the suffix: a key ends at the first dot, so several images become one", _NAMES),
    "case_clash": Rule("warning", "keys that differ in upper and lower case only; they are different samples", _NAMES),
    "no_image": Rule("error", "a sample without an image", "add the image, or take the other members out"),
    "several_images": Rule("error", "a sample with several images", "keep one, or give each a key of its own"),
    "bad_label": Rule("error", "a label that can not be read: .cls holds one whole number, .json an object", "write it anew"),
    "negative_label": Rule("error", "a label below -1 (-1 is: none)", "number the classes from 0"),
    "label_beyond_classes": Rule("error", "a label for which the manifest has no class name", f"mend it, or {_INDEX}"),
    "unused_label": Rule(
        "warning", "a label that is not read: text in .json, or a number in .txt", "write a .cls member with the class number"
    ),
    "some_unlabelled": Rule("warning", "samples without a label beside others with one", "label them, or train without labels"),
    # Images
    "wrong_suffix": Rule("warning", "an image of another format than its suffix says; readers go by the content", _NOTHING),
    "not_an_image": Rule("error", "content that begins like no known image format", _TAKE_OUT),
    "image_cut_off": Rule("error", "an image that is cut off", _TAKE_OUT),
    "image_corrupt": Rule("error", "an image that is damaged", _TAKE_OUT),
    "too_many_pixels": Rule("error", "an image with more pixels than the limit", "shrink it, or raise max_pixels"),
    "pixel_type": Rule("error", "pixels that do not become 8 bits by a defined way", "store them as 8 or 16 bits"),
    "channels": Rule("error", "channels that do not become grey or colour by a defined way", "store .npy arrays of (H, W, C)"),
    "mixed_channels": Rule(
        "warning",
        "images of different numbers of channels; 1 and 3 are converted, others replaced",
        "nothing for 1 beside 3; separate others",
    ),
    # The data set
    "bad_manifest": Rule("error", f"{MANIFEST_NAME} or the index can not be used", _INDEX),
    "missing_shard": Rule("error", "a shard that the manifest lists is not there", f"copy it there, or {_INDEX}"),
    "remote_shard": Rule("warning", "a shard that lies elsewhere: it is not checked", "copy it here to have it checked"),
    "unlisted_shard": Rule("warning", "a tar that the manifest does not list: it is not read", _INDEX),
    "size_differs": Rule("error", "a shard of another size than the manifest says", f"copy it again, or {_INDEX}"),
    "hash_differs": Rule("error", "a shard of other content than the manifest says", f"copy it again, or {_INDEX}"),
    "count_differs": Rule(
        "error", "a shard of another number of samples than the manifest says", f"copy it again, or {_INDEX}"
    ),
    "index_differs": Rule("error", "the index points to other places or labels than the shard has", _INDEX),
}
"""Every rule by its name."""

RULE_OF_CAUSE: dict[Cause, str] = {
    "not_an_image": "not_an_image",
    "truncated": "image_cut_off",
    "corrupt": "image_corrupt",
    "too_many_pixels": "too_many_pixels",
    "pixel_type": "pixel_type",
    "channels": "channels",
}
"""The rule under which an image that can not be decoded is counted."""
