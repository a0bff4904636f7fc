# The server alone, static, as nobody, on an empty image:
#
#	docker build -t headcount .
#	docker run -p 8080:8080 headcount
#
# /metrics and the rest of the admin address stay on the container's loopback;
# HEADCOUNT_ADMIN_LISTEN opens them, and the health check follows it, also where it is in the
# file that HEADCOUNT_CONFIG names.

ARG GO_VERSION=1.26
FROM golang:${GO_VERSION} AS build
WORKDIR /src
COPY go.mod go.sum ./
COPY client/go.mod client/go.sum client/
RUN go mod download
COPY . .
ARG VERSION=
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags nomsgpack -ldflags "-s -w -X main.version=${VERSION}" -o /headcount ./cmd/headcount
RUN go run ./cmd/release -licenses /headcount >/THIRD-PARTY-LICENSES

FROM scratch
# For --jwks-url over https and --redis over TLS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /headcount /headcount
COPY LICENSE /LICENSE
COPY --from=build /THIRD-PARTY-LICENSES /THIRD-PARTY-LICENSES
USER 65532:65532
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["/headcount", "healthcheck"]
# SIGTERM drains for --shutdown-timeout, 30s; docker stop waits 10s unless told
# otherwise: docker stop -t 35.
ENTRYPOINT ["/headcount"]
CMD ["serve"]
