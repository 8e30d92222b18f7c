package roostream;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;

/**
 * What a record says of event time. Nothing, if it is not an event, a heartbeat or an end marker of our version, if its protobuf
 * can't be walked, or if its own time is not its record's: that is for Python to judge, which sees every event.
 */
final class TimeSignal {
    enum Kind { NOTHING, EVENT, HEARTBEAT, END_MARKER }

    private static final int VERSION = 1;
    private static final long LATEST_MS = 253_402_300_799_999L; // joiner/ingest.py
    private static final int HEADER_TIME = 5;

    final Kind kind;
    final long timeMs;
    final String producer;

    /** A heartbeat or end marker with nothing else in it: there is nothing left for Python to say. */
    final boolean isPlain;

    private TimeSignal(Kind kind, long timeMs, String producer, boolean isPlain) {
        this.kind = kind;
        this.timeMs = timeMs;
        this.producer = producer;
        this.isPlain = isPlain;
    }

    static TimeSignal of(byte[] in) {
        int at = Envelope.valueAt(in);
        if (in.length < at + 2 || in[at + 1] != VERSION) {
            return nothing();
        }
        boolean isEvent = in[at] == 1 || in[at] == 2;
        if (!isEvent && in[at] != 6 && in[at] != 7) {
            return nothing();
        }
        Walk walk = new Walk(in, at + 2, in.length);
        if (isEvent) {
            long timeMs = walk.eventTime();
            return told(in, Kind.EVENT, timeMs, "", false);
        }
        boolean beats = in[at] == 6;
        walk.beat(beats);
        return told(in, beats ? Kind.HEARTBEAT : Kind.END_MARKER, walk.timeMs, walk.producer, walk.isPlain);
    }

    private static TimeSignal told(byte[] in, Kind kind, long timeMs, String producer, boolean isPlain) {
        boolean holds = timeMs >= 1 && timeMs <= LATEST_MS && timeMs == Envelope.timestampOf(in);
        return holds ? new TimeSignal(kind, timeMs, producer, isPlain) : nothing();
    }

    private static TimeSignal nothing() {
        return new TimeSignal(Kind.NOTHING, Long.MIN_VALUE, "", false);
    }

    /** Over the fields of one message; `at` is -1 once it can't be one. */
    private static final class Walk {
        private final ByteBuffer data;
        private final int end;
        private int at;
        private int field;
        private int type;
        private int size; // of a field's value
        long timeMs = Long.MIN_VALUE;
        String producer = "";
        boolean isPlain = true;

        Walk(byte[] data, int at, int end) {
            this.data = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN);
            this.at = at;
            this.end = end;
        }

        /** Header.time_ms of an impression or engagement; MIN_VALUE if there is none, or the message is damaged. */
        long eventTime() {
            long found = Long.MIN_VALUE;
            while (next()) {
                if (field == 1 && type == 2) {
                    Walk header = new Walk(data.array(), at, at + size);
                    while (header.next()) {
                        if (header.field == HEADER_TIME && header.type == 1) {
                            found = data.getLong(header.at);
                        }
                        header.at += header.size;
                    }
                    if (header.at < 0) {
                        return Long.MIN_VALUE;
                    }
                }
                at += size;
            }
            return at < 0 ? Long.MIN_VALUE : found;
        }

        /** Heartbeat or EndMarker: time_ms = 1, and of the former producer = 2. */
        void beat(boolean named) {
            while (next()) {
                if (field == 1 && type == 1) {
                    timeMs = data.getLong(at);
                } else if (named && field == 2 && type == 2) {
                    producer = new String(data.array(), at, size, StandardCharsets.UTF_8);
                    isPlain &= isAscii(at, size);
                } else {
                    isPlain = false;
                }
                at += size;
            }
            if (at < 0) {
                timeMs = Long.MIN_VALUE;
                isPlain = false;
            }
        }

        private boolean isAscii(int from, int bytes) {
            for (int i = from; i < from + bytes; i++) {
                if (data.get(i) < 0) {
                    return false;
                }
            }
            return true;
        }

        /** To the next field's value; false at the end and where the bytes are no field. */
        private boolean next() {
            if (at < 0 || at >= end) {
                return false;
            }
            long tag = varint();
            field = (int) (tag >>> 3);
            type = (int) (tag & 7);
            long bytes = switch (type) {
                case 0 -> lengthOfVarint();
                case 1 -> 8;
                case 2 -> varint();
                case 5 -> 4;
                default -> -1;
            };
            if (at < 0 || tag <= 7 || tag > 0xFFFFFFFFL || bytes < 0 || bytes > end - at) {
                at = -1;
                return false;
            }
            size = (int) bytes;
            return true;
        }

        private int lengthOfVarint() {
            int from = at;
            varint();
            int length = at - from;
            at = at < 0 ? -1 : from;
            return length;
        }

        private long varint() {
            long value = 0;
            for (int shift = 0; at >= 0 && shift < 70; shift += 7) {
                if (at >= end) {
                    break;
                }
                byte b = data.get(at++);
                value |= (long) (b & 127) << shift;
                if (b >= 0) {
                    return value;
                }
            }
            at = -1;
            return -1;
        }
    }
}
