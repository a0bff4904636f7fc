module beside

go 1.26.0

require (
	github.com/gobwas/ws v1.5.0
	github.com/lesismal/nbio v1.6.8
	golang.org/x/sys v0.50.0
)

require (
	github.com/gobwas/httphead v0.1.0 // indirect
	github.com/lesismal/llib v1.2.2 // indirect
	golang.org/x/crypto v0.0.0-20210513122933-cd7d49e622d5 // indirect
)
