"""Bounds of the network log and of what users say (feedback).

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- network log: the files -------------------------------------------------------------------------------------------
NETLOG_BYTES: Final = 4 * 1024 * 1024
"""All files of a folder where the config says nothing: a failure is about 200 bytes compressed, so some thousands."""
NETLOG_BYTES_MIN: Final = 1024 * 1024
"""The least that can be set: the tail of one process, and files enough that dropping one keeps most."""
NETLOG_BYTES_MAX: Final = 1024 * 1024 * 1024
"""The most that can be set: a device gives no more to a log, and a reader holds it whole."""
NETLOG_FILES: Final = 16
"""A file is begun anew at this share of all bytes; so much is lost when the oldest goes."""
NETLOG_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A file larger than this is none of ours, and not read."""
NETLOG_FILES_READ_MAX: Final = 1024
"""Files of a folder that are looked at, the newest: some hundred processes that ended early leave as many."""
NETLOG_HALF_BYTES: Final = 128 * 1024
"""Each half of the memory-mapped tail: records gather in one while the other is compressed. A burst of 256 KB, some
three hundred failures at once, is kept though the disk is busy."""
NETLOG_BLOCK_BYTES_MAX: Final = 256 * 1024
"""A block on disk, and what comes of one: twice a half. A reader holds one at a time and believes no larger."""
NETLOG_BLOCK_RECORDS_MAX: Final = 16 * 1024
"""Records in a block: the smallest has some 20 bytes."""
NETLOG_READ_FACTOR: Final = 8
"""Bytes that a reader looks at for each byte of a file: what is damaged on purpose must not keep it busy."""
NETLOG_MOVE_S: Final = 30.0
"""From the first record in a half to its compression: a power cut loses at most what came since. Less would wake a
device more often."""
NETLOG_CLOSE_S: Final = 2.0
"""What closing waits for the last block; what is not written then is in the tail, and the next start finds it."""
NETLOG_PENDING_RECORDS_MAX: Final = 1000
"""Records kept in memory until the folder is open: the first milliseconds of a process."""
NETLOG_LEVEL: Final = 3
"""zstd level: 128 KB of records take about a millisecond, and 9 saves a tenth more for five times that."""

# -- network log: the records -----------------------------------------------------------------------------------------
NETLOG_RECORD_BYTES_MAX: Final = 32 * 1024
"""One record; a failure with all its attempts and a story of 64 lines is less. A larger one is counted as lost."""
NETLOG_TEXT_CHARS_MAX: Final = 8 * 1024
"""A line of the app's own log, and its traceback; what is longer keeps its beginning."""
NETLOG_STORY_CHARS_MAX: Final = 256
"""A line of a call's story."""
NETLOG_CAUSES_MAX: Final = 8
"""Exceptions in a chain of causes."""
NETLOG_SUMMARY_S: Final = 60.0
"""Calls that succeed are counted for so long, and then written as one line; a crash loses that count."""
NETLOG_LAST_BYTES: Final = 128 * 1024
"""Last failures kept in memory, for feedback: some hundred and fifty."""

# -- feedback ---------------------------------------------------------------------------------------------------------
FEEDBACK_TEXT_CHARS_MAX: Final = 4000
"""What a person says: a page."""
FEEDBACK_WORD_CHARS_MAX: Final = 128
"""Names of client and platform."""
FEEDBACK_LOG_BYTES_MAX: Final = 96 * 1024
"""The log that goes with it, compressed: about five hundred failures, and a minute of a weak network."""
FEEDBACK_BYTES_MAX: Final = 128 * 1024
"""One feedback as it is sent: the log, the text in the longest UTF-8, and the fields around them."""
FEEDBACK_KEPT_MAX: Final = 16
"""Feedback kept on a device until there is a way; the oldest goes."""
FEEDBACK_SEND_S: Final = 20.0
"""What one sending takes at most, over all ways; then it is kept."""
FEEDBACK_RETRY_S: Final = 30.0
"""First pause before what is kept is sent again; doubled up to ten times that, jittered."""
FEEDBACK_ANSWER_BYTES_MAX: Final = 8 * 1024
"""The answer to feedback, its errors too."""
FEEDBACK_DEVICE_BURST: Final = 10
"""Feedback taken from one device at once: what a device kept offline, and some more."""
FEEDBACK_DEVICE_PAUSE_S: Final = 360.0
"""After that one each six minutes: people do not write more."""
FEEDBACK_DEVICES_MAX: Final = 10_000
"""Devices whose rate is remembered; one that is forgotten begins with a full burst."""
FEEDBACK_ROWS_MAX: Final = 100_000
"""Feedback that one store holds, some gigabytes at most; then it takes no more until the oldest have expired."""
FEEDBACK_LIST_MAX: Final = 200
"""Feedback in one answer to an operator, without its logs."""
FEEDBACK_DAYS: Final = 90
"""Days that feedback stays in the store: a quarter; there is little of it."""
